"""The reward server: one HTTP address in front of any number of reward models."""

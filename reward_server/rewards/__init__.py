"""Reward models: one file each; the file's name is the reward's name."""

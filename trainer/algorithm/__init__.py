"""MAR-GRPO as pure functions of tensors: no I/O, no models, no configuration objects."""

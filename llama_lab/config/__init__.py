"""What the user asks for: composing, checking and building from Hydra configs."""

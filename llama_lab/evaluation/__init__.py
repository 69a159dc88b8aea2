"""What a trained run is worth: its losses, its memory and speed when it generates, and its text."""

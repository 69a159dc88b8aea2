"""Hugging Face: its families in our terms, models in and out, and loading whatever folder holds one."""

"""Exchange with Hugging Face: model families, import, export, and loading from folders."""

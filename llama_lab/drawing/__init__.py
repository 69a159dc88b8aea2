"""Pictures of architectures."""

"""What a run would cost on some device."""

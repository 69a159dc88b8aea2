"""What things cost on this machine, measured side by side: `python -m llama_lab.bench`."""

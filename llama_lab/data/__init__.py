"""From text to windows of tokens: sources, tokenizers, token folders, windows; probes."""

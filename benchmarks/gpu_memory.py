"""What PyTorch holds on a GPU between two measurements."""

import gc

import torch


def allocated(device: torch.device) -> int:
    """Bytes of all tensors on a GPU; 0 elsewhere."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def free() -> None:
    """Give back what an earlier measurement has left: tensors in cycles of references, compiled code, kept memory."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

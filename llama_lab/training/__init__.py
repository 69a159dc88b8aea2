"""One run: the module, its optimizer and schedule, and what happens around a step."""

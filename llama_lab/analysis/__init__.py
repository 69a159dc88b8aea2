"""Records and their contrasts in, a typed result out: statistics, warnings, verdicts. Nothing here renders."""

"""The book of claims: statements of textbooks and papers, run and judged."""

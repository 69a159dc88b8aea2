"""The report's charts, one function each: from a Result to a Chart."""

"""What a study's result becomes: tables, charts, a page, files for papers."""

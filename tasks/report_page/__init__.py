"""The page that shows a run: facts from SQL, pictures as inline SVG, a table beside each, all text escaped."""

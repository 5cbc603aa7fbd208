"""CSV and TSV as samples: rows, cells, and the schema of an import."""

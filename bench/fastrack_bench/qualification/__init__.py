"""The rows of ``fastrack qualify``, each an attack or a look at the machine, and the record of what was seen."""

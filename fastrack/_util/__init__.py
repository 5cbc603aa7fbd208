"""Hold what knows neither tensors nor cryptography: files, forks, guards, trees, traces."""

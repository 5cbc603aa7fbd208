"""A server of a sealed model: `docs/serving.md` describes it."""

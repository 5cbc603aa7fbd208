"""A server of a sealed model: `docs/serving-reference.md` describes it."""

"""Application of a plan to a model: checked on the meta device, applied part by part, materialised after sharding."""

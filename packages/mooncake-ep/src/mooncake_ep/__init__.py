"""Expert-parallel dispatch and combine for mixture-of-experts models."""

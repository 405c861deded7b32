"""Engines: a trainer and a sampler over one base model. They know no HTTP, SQL, users or text."""

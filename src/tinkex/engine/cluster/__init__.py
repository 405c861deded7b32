"""Engines on a Ray cluster: the trainers and samplers of a base model as actors. The only importer of ray."""

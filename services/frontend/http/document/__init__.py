"""The OpenAPI document: schemas of answers and examples of bodies."""

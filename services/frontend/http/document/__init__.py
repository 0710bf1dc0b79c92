"""The OpenAPI document: shapes of answers and examples of bodies."""

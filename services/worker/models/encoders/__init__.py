"""Models that read texts and write none: BERT and what came of it."""

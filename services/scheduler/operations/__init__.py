"""Operations on all workers at once, and the reconciliation of workers that attach later."""

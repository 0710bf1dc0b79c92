"""Grammar libraries side by side: python -m quire.services.worker.structured.bench"""

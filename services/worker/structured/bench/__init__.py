"""Grammar libraries side by side: python -m services.worker.structured.bench"""

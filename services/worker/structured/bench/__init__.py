"""Benchmark that compares grammar libraries: python -m quire.services.worker.structured.bench"""

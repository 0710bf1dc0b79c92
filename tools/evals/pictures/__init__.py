"""Pictures with known contents: handwritten digits, drawn shapes and printed words, with questions about them.

Drawing needs numpy and Pillow.
"""

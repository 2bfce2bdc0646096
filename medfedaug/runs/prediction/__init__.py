"""Predictions of a finished model: of images, of studies in an archive, case by case."""

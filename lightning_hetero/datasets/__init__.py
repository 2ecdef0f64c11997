"""Data that ships with a package or is generated: nothing is downloaded."""

from lightning_hetero.datasets.digits import DigitsDataModule, DigitsTokenizer

__all__ = ["DigitsDataModule", "DigitsTokenizer"]

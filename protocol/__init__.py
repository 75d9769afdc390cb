"""The words that the gateway, the worker and cachectl share. Imports no other room and no torch."""

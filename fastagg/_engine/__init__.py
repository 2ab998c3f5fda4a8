"""The engine: private, and free to change. docs/architecture.md shows what is where, and what may import what."""

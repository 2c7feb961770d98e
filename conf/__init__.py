"""The Hydra configuration of `autoshard.train`: YAML groups beside this file, and their types in `schema`."""

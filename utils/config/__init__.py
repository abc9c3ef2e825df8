"""How settings are read, checked and written; it knows none of them."""

# types of values, with bounds; `require` raises an error with its fix
from utils.config.bounds import (
    Bound,
    Count,
    NonNegativeFloat,
    Number,
    PositiveFloat,
    PositiveInt,
    fit,
    read_fields,
    require,
)

# settings from a YAML file and flags
from utils.config.cli import parse_args, parse_given, read_config

# --plugin
from utils.config.plugin import PLUGIN, check_plugin, load_plugin

# functions by name, for settings such as --optimizer
from utils.config.table import Table, suggestion

# YAML files
from utils.config.yaml_text import read_yaml

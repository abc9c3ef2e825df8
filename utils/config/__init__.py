"""How settings are read, checked and written. The settings are in utils/settings/."""

# types of values, with bounds; `require` raises an error with its fix
from utils.config.bounds import (
    Arguments,
    Bound,
    Chosen,
    Count,
    Fixed,
    Fraction,
    FractionBelow1,
    Machine,
    NonNegativeFloat,
    NonNegativeInt,
    NotEmpty,
    Number,
    OneStart,
    PositiveFloat,
    PositiveInt,
    Probability,
    ProbabilityBelow1,
    at_least,
    at_most,
    exclude,
    find_marked,
    fit,
    read_fields,
    require,
)

# settings from a YAML file and flags
from utils.config.cli import FORMAT_FIX, parse_args, parse_given, read_file

# a class of settings as flags
from utils.config.flags import Settings

# --plugin
from utils.config.plugin import PLUGIN_HASHES, check_plugin, load_plugin

# functions by name, for settings such as --optimizer
from utils.config.registry import Registry

# similar names, for a name that does not exist
from utils.config.suggestions import fix_for_unknown, suggestion

# YAML files
from utils.config.yaml_text import dump_yaml, read_yaml

"""All model families of transformers that the tests run, in one table."""

from family import Family
from perception_families import PERCEPTION_FAMILIES
from text_families import TEXT_FAMILIES

FAMILIES: tuple[Family, ...] = TEXT_FAMILIES + PERCEPTION_FAMILIES
BY_NAME: dict[str, Family] = {family.name: family for family in FAMILIES}

"""Sites: folders of images with a few labels, checked, decoded once, and made of public data sets for rehearsals."""

from halfmoon.site.check import Survey, check
from halfmoon.site.export import export
from halfmoon.site.folder import Finding, Site, look, read
from halfmoon.site.prepare import Prepared, open_site, prepare

__all__ = ["Finding", "Prepared", "Site", "Survey", "check", "export", "look", "open_site", "prepare", "read"]

"""Sites: folders of images with a few labels, checked, decoded once, and made of public data sets for rehearsals."""

from halfmoon.federation.site_data.check import Survey, check
from halfmoon.federation.site_data.export import export
from halfmoon.federation.site_data.prepare import Prepared, open_site, prepare
from halfmoon.federation.site_data.site_folder import Finding, SiteFolder, look, read

__all__ = ["Finding", "Prepared", "SiteFolder", "Survey", "check", "export", "look", "open_site", "prepare", "read"]

"""Sites: folders of images with a few labels, checked, decoded once, and made of public data sets for rehearsals."""

from halfmoon.sites.folders.check import Survey, check
from halfmoon.sites.folders.export import export
from halfmoon.sites.folders.prepare import Prepared, open_site, prepare
from halfmoon.sites.folders.site_folder import Finding, SiteFolder, read, scan

__all__ = ["Finding", "Prepared", "SiteFolder", "Survey", "check", "export", "open_site", "prepare", "read", "scan"]

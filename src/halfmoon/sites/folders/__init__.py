"""Sites: folders of images with a few labels, checked, decoded once, and made of public data sets for rehearsals."""

from halfmoon.sites.folders.check import Survey, check_site
from halfmoon.sites.folders.export import export_sites
from halfmoon.sites.folders.prepare import PreparedSite, open_prepared_site, prepare_site
from halfmoon.sites.folders.site_folder import Finding, SiteFolder, read_site, scan_site

__all__ = [
    "Finding",
    "PreparedSite",
    "SiteFolder",
    "Survey",
    "check_site",
    "export_sites",
    "open_prepared_site",
    "prepare_site",
    "read_site",
    "scan_site",
]

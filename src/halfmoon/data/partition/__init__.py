"""Who holds which image and which are labeled: scenarios, split rules, splits and how uneven they are."""

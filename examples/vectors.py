# Learn to train on vectors with scikit-learn's fit and predict, and to measure the gain from unlabeled rows.
# %% [markdown]
# # Vectors in scikit-learn
# `FederatedClassifier` trains on vectors, such as embeddings of text or rows of a table. Here they are random Fourier
# features of digits. Five clients have ten labels a class in total, and they only send sums over rows.
# %%
import numpy as np
import pandas as pd
from sklearn.datasets import load_digits
from sklearn.kernel_approximation import RBFSampler
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, PredefinedSplit, train_test_split
from sklearn.semi_supervised import LabelSpreading, SelfTrainingClassifier

from halfmoon import FederatedClassifier
from halfmoon.report.paired import compare_paired

pixels, digits = load_digits(return_X_y=True)


def draw(seed):
    """Return features and labels of 70 % of the rows, where -1 hides all but ten labels a class, and of the others."""
    X = RBFSampler(gamma="scale", n_components=300, random_state=seed).fit_transform(pixels)
    X, test_X, y, test_y = train_test_split(X, digits, test_size=0.3, stratify=digits, random_state=seed)
    return X, np.where(pd.Series(y).groupby(y).cumcount() < 10, y, -1), test_X, test_y


X, y, test_X, test_y = draw(seed=0)
model = FederatedClassifier(n_clients=5).fit(X, y)
model.method_, model.score(test_X, test_y)
# %% [markdown]
# scikit-learn's classifiers have all rows in one place. Five-fold cross-validation on the labeled training rows chooses
# their settings; unlabeled rows are in every training fold. `FederatedClassifier` has its defaults.
# %%
logistic = LogisticRegression(max_iter=1000)
strengths = {"estimator__C": [1, 10, 100]}
graphs = [{"gamma": [1, 5, 20]}, {"kernel": ["knn"], "n_neighbors": [3, 7, 15]}]
searches = {
    "FederatedClassifier": (FederatedClassifier(), {}),
    "FederatedClassifier, ridge-head": (FederatedClassifier("ridge-head"), {}),
    "LogisticRegression": (SelfTrainingClassifier(logistic, max_iter=0), strengths),  # labeled rows only
    "SelfTrainingClassifier": (SelfTrainingClassifier(logistic), strengths),
    "LabelSpreading": (LabelSpreading(), graphs),
}
np.seterr(invalid="ignore")  # LabelSpreading divides by 0 where its kernel is too narrow
scores = {name: [] for name in searches}
for X, y, test_X, test_y in map(draw, range(5)):
    folds = PredefinedSplit(np.where(y >= 0, pd.Series(y).groupby(y).cumcount() % 5, -1))
    for name, (model, grid) in searches.items():
        search = GridSearchCV(model, grid, cv=folds) if grid else model  # without settings there is nothing to choose
        scores[name].append(100 * search.fit(X, y).score(test_X, test_y))
# %% [markdown]
# Gains are percentage points, paired by seed. The 95 % intervals allow for four comparisons and overlapping splits.
# %%
ours, others = scores["FederatedClassifier"], list(scores)[1:]
rows = {one: compare_paired(ours, scores[one], test_train_ratio=0.3 / 0.7, comparisons=4)[:3] for one in others}
table = pd.DataFrame(rows, index=["gain", "from", "to"]).T.reindex(list(scores))
print(table.assign(accuracy=pd.DataFrame(scores).mean()).round(1))

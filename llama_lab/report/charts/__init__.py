"""The report's charts, one function each: from a Result to a Plotly figure.

A figure has no legend: the page adds one of buttons, which wrap on a phone and can be reached by keyboard. For it, each
trace of an arm has `meta`: `arm`, its name; `view`, the options that must all be chosen for it to be visible, if the
figure has several; `x`, its x values for each choice of the axis. The layout's `meta["choices"]` holds the options by
group, each with its changes to the layout; the figure opens with the first option of each group.
"""

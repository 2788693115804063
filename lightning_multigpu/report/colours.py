"""Okabe and Ito's colours, which colour-blind people can tell apart."""

ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"
GREY, LIGHT = "#8a8a8a", "#d9d9d9"

// Integer dot.
#pragma once

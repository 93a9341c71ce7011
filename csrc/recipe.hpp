// Recipes rebuild a value from the arguments or results of a call, through views and containers.
//
// A recipe is written once, from an earlier call, as nested tuples:
//
//     ("constant", value)  ("given", i)  ("given", i, j)  ("named", name)  ("named", name, j)
//     ("view", recipe, shape)  ("as_strided", recipe, shape, strides)  ("div_", recipe, number)
//     ("list", [recipe...])  ("tuple", [recipe...])  ("dict", {key: recipe})  ("call", function, [recipe...])
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "python.hpp"

namespace weft {

namespace nb = nanobind;

// The arguments of a call by position (a sequence) and by name (a dict), or its results by position.
struct Given {
    nb::handle positional, named;
};

class Recipe {
  public:
    explicit Recipe(nb::handle written) {
        const nb::tuple parts = nb::cast<nb::tuple>(written);
        const std::string kind = nb::cast<std::string>(parts[0]);
        const size_t size = nb::len(parts);
        auto require = [&](bool holds) {
            if (!holds) throw std::invalid_argument("not a recipe: " + std::string(nb::repr(written).c_str()));
        };
        require(size >= 2);
        first_ = nb::object(parts[1]);
        if (kind == "constant") {
            kind_ = constant;
        } else if (kind == "given" || kind == "named") {
            kind_ = kind == "given" ? given : named;
            if (kind_ == given) index_ = nb::cast<int64_t>(first_);
            require(index_ >= 0);
            if (size > 2) nth_ = nb::cast<int64_t>(parts[2]);
        } else if (kind == "view" || kind == "div_" || kind == "as_strided") {
            require(size == (kind == "as_strided" ? 4 : 3));
            kind_ = kind == "as_strided" ? as_strided : method;
            children_.emplace_back(parts[1]);
            first_ = nb::object(parts[2]);
            if (kind_ == as_strided) second_ = nb::object(parts[3]);
            method_ = interned(kind.c_str());
        } else if (kind == "list" || kind == "tuple") {
            kind_ = kind == "list" ? list : tuple;
            for (nb::handle one : nb::cast<nb::list>(first_)) children_.emplace_back(one);
        } else if (kind == "dict") {
            kind_ = dict;
            for (auto [key, one] : nb::cast<nb::dict>(first_)) {
                keys_.push_back(nb::borrow(key));
                children_.emplace_back(one);
            }
        } else if (kind == "call") {
            require(size == 3);
            kind_ = called;
            for (nb::handle one : nb::cast<nb::list>(nb::object(parts[2]))) children_.emplace_back(one);
        } else {
            require(false);
        }
    }

    nb::object make(const Given &from) const {
        switch (kind_) {
        case constant:
            return first_;
        case given:
            return item(checked(PySequence_GetItem(from.positional.ptr(), index_)));
        case named: {
            PyObject *const found = PyDict_GetItemWithError(from.named.ptr(), first_.ptr());
            if (!found) {
                if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, first_.ptr());
                throw nb::python_error();
            }
            return item(nb::borrow(found));
        }
        case method:
            return call_method(children_[0].make(from), method_, first_);
        case as_strided:
            return call_method(children_[0].make(from), method_, first_, second_);
        case list: {
            nb::list made;
            for (const Recipe &one : children_) made.append(one.make(from));
            return made;
        }
        case tuple:
            return nb::tuple(made_of_all(from));
        case dict: {
            nb::dict made;
            for (size_t i = 0; i < keys_.size(); ++i)
                if (PyDict_SetItem(made.ptr(), keys_[i].ptr(), children_[i].make(from).ptr())) throw nb::python_error();
            return made;
        }
        case called:
            return checked(PyObject_CallObject(first_.ptr(), nb::tuple(made_of_all(from)).ptr()));
        }
        throw std::logic_error("a recipe of an unknown kind");
    }
    // Makes each entry of a list, tuple or dict.
    void make_each(const Given &from, std::vector<nb::object> &made) const {
        for (const Recipe &one : children_) made.push_back(one.make(from));
    }
    size_t size() const { return children_.size(); }

  private:
    enum Kind { constant, given, named, method, as_strided, list, tuple, dict, called };

    nb::object item(nb::object found) const {
        return nth_ < 0 ? found : checked(PySequence_GetItem(found.ptr(), nth_));
    }
    nb::list made_of_all(const Given &from) const {
        nb::list made;
        for (const Recipe &one : children_) made.append(one.make(from));
        return made;
    }

    Kind kind_ = constant;
    int64_t index_ = 0, nth_ = -1;
    nb::object first_, second_, method_;
    std::vector<nb::object> keys_;
    std::vector<Recipe> children_;
};

}  // namespace weft

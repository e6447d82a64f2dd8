// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"testing"
)

func TestWithPackages(t *testing.T) {
	for _, tc := range []struct{ args, want []string }{
		{nil, []string{"./..."}},
		{[]string{"-race", "-shuffle=on"}, []string{"-race", "-shuffle=on", "./..."}},
		{[]string{"-race", "./bpf"}, []string{"-race", "./bpf"}},
		{[]string{"-run", "X"}, []string{"-run", "X", "./..."}},
		{[]string{"-run", "X", "./bpf"}, []string{"-run", "X", "./bpf"}},
		{[]string{"-shuffle", "on", "-count", "2"}, []string{"-shuffle", "on", "-count", "2", "./..."}},
		{[]string{"-short", "-args", "-x"}, []string{"-short", "./...", "-args", "-x"}},
	} {
		if got := withPackages(tc.args); !slices.Equal(got, tc.want) {
			t.Errorf("%q: %q, want %q", tc.args, got, tc.want)
		}
	}
}

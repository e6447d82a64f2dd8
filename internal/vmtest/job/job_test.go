// SPDX-License-Identifier: Apache-2.0

package job

import (
	"errors"
	"strings"
	"testing"
)

func TestReport(t *testing.T) {
	var b strings.Builder
	Starting(&b)
	first := b.String()
	Ending(&b, 137)
	both := b.String()
	b.Reset()
	Failing(&b, errors.New("no\nmodule"))
	for text, want := range map[string]Report{
		"":                                     {},
		first:                                  {Started: true},
		both:                                   {Started: true, Ended: true, Code: 137},
		b.String():                             {Error: "no module"},
		strings.ReplaceAll(both, "\n", "\r\n"): {Started: true, Ended: true, Code: 137},
	} {
		got, err := ReadReport(strings.NewReader(text))
		if err != nil || got != want {
			t.Errorf("%q: %+v, %v; want %+v", text, got, err, want)
		}
	}
	for _, text := range []string{"ended\n", "ended x\n", "ended 1 2\n", "other\n", "star\n"} {
		if got, err := ReadReport(strings.NewReader(text)); err == nil {
			t.Errorf("%q: %+v, want an error", text, got)
		}
	}
}

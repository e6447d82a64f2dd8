// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"os"
	"regexp"
	"slices"
	"testing"
)

// docs/doctor.md has the checks, in their order, and what they look at.
func TestDocument(t *testing.T) {
	text, err := os.ReadFile("../../docs/doctor.md")
	if os.IsNotExist(err) && testing.Short() {
		t.Skip("a virtual machine has no documents")
	}
	if err != nil {
		t.Fatal(err)
	}
	var names, about []string
	for _, row := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\| (.*?) \\| (.+) \\|$").FindAllStringSubmatch(string(text), -1) {
		names, about = append(names, row[1]), append(about, row[2])
	}
	wantNames, wantAbout := Checks()
	if !slices.Equal(names, wantNames) {
		t.Errorf("checks %q, want %q", names, wantNames)
	}
	if !slices.Equal(about, wantAbout) {
		t.Errorf("they look at %q, want %q", about, wantAbout)
	}
}
